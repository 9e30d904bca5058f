"""The serving image: an OpenAI-compatible endpoint for a committed model."""
