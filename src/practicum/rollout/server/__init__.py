"""A model behind HTTP, in OpenAI's shapes: an engine that generates, or a classifier that scores."""

from practicum.rollout.server.app import ModelServer, serve
from practicum.rollout.server.classification import ClassificationService
from practicum.rollout.server.generation import GenerationService
from practicum.rollout.server.launch import classification_service, generation_service, service_of
from practicum.rollout.server.service import Service

__all__ = [
    "ClassificationService",
    "GenerationService",
    "ModelServer",
    "Service",
    "classification_service",
    "generation_service",
    "serve",
    "service_of",
]
