"""What generates answers: transformers or vLLM."""
