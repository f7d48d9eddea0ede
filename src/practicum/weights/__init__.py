"""Weights on their way from trainer to engine: versions, channels, and the proof that they arrived."""

from practicum.weights.channel import (
    ChannelSettings,
    Sender,
    Ticket,
    WeightSource,
    WeightUpdate,
    channel_timeout_s,
)
from practicum.weights.channels import CHANNELS, Place, WeightReceiver, choose, open_sender
from practicum.weights.fingerprint import TIGHTEST, Bound, Fingerprint

__all__ = [
    "CHANNELS",
    "TIGHTEST",
    "Bound",
    "ChannelSettings",
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
