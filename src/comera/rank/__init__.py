"""Rank adaptation: sizes, objectives, the controller, physical shrinking."""
