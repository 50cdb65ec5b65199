"""Which way to contract: plans made from costs."""
