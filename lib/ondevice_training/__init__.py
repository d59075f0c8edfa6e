"""Training of the bundled models: `python -m ondevice_training --help`."""
