"""Layers: TTLinear, TTMEmbedding, TTMProjection, and the chain of cores they hold."""
