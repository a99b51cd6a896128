"""Models that can be observed: one call per attention layer."""
