"""The frozen model: what its pass computes; loading, placement, quantisation, adapters."""
