"""Any diffusers pipeline as a policy: scheduler, encoding, decoding, loading, weights."""
