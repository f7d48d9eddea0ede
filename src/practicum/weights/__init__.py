"""Trainer to engine: versions, the ways weights travel, and the proof that they arrived."""

from practicum.weights.channel import ChannelSettings, Sender, Ticket, channel_timeout_s
from practicum.weights.channels import CHANNELS, Place, WeightReceiver, choose, open_sender
from practicum.weights.fingerprint import TIGHTEST, Bound, CheckedEngine, Fingerprint
from practicum.weights.update import WeightSource, WeightUpdate

__all__ = [
    "CHANNELS",
    "TIGHTEST",
    "Bound",
    "ChannelSettings",
    "CheckedEngine",
    "Fingerprint",
    "Place",
    "Sender",
    "Ticket",
    "WeightReceiver",
    "WeightSource",
    "WeightUpdate",
    "channel_timeout_s",
    "choose",
    "open_sender",
]
