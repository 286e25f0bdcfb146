"""The models that a command begins with, made where they are missing. The way in is `models`."""
