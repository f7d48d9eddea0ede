"""A model behind HTTP, in OpenAI's shapes: an engine that writes, or a classifier that scores."""

from practicum.rollout.serving.classify import ClassifyService
from practicum.rollout.serving.server import ModelServer
from practicum.rollout.serving.service import Service
from practicum.rollout.serving.writing import WritingService

__all__ = ["ClassifyService", "ModelServer", "Service", "WritingService"]
