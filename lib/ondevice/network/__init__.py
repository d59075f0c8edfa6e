"""A link between two processes: as a model of time, and as a TCP relay that keeps to the model; sockets that listen."""
