"""Training of the bundled models: `python -m ondevice.training --help`."""
