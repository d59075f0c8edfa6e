"""The pair of programs: a cloud and a device, and what they are made of; no experiment needs its inside."""
