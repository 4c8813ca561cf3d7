"""Human preference and text-image agreement."""
