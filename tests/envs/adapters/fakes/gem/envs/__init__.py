"""Registers what ships."""
