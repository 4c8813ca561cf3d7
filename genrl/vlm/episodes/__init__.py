"""Episodes of a vision-language model in an environment: acting, rows of a loss, credit, evaluation."""
