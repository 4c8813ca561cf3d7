"""Language and vision-language models as judges."""
