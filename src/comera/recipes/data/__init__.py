"""Readers of raw input for the recipes."""
