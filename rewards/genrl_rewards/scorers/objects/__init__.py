"""Which objects a picture shows, where, and how they moved."""
