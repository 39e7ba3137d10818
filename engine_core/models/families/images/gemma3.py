"""Gemma 3 with images: its text model."""

from engine_core.models.families.dense import gemma3
from engine_core.models.families.family import family_with_images

FAMILIES = (family_with_images("Gemma3", "gemma3", gemma3.read),)
