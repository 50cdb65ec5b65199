"""Sentence pairs."""
