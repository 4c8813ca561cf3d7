"""Meta-World (arXiv 1910.10897): fifty tasks of a robot arm, with instructions, as environments of `genrl.vla`."""
