"""A link between two processes: as a model of time, and as a TCP relay that keeps to the model."""

from ondevice.network.link import PERFECT, Line, Link, Sinusoid, Trace, Wire
from ondevice.network.relay import Relay

__all__ = ["PERFECT", "Line", "Link", "Relay", "Sinusoid", "Trace", "Wire"]
