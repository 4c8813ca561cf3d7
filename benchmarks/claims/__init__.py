"""Every claim of the pages as data (benchmarks/claims.yaml), its runs (benchmarks/runs), and the tables made of them.

    python -m benchmarks.claims                        # every run: stored or missing, and what it would cost
    python -m benchmarks.claims next --minutes 60      # the most valuable missing ones, on one core
    python -m benchmarks.claims table                  # the marked tables and figures of the pages
    python -m benchmarks.claims verdicts               # every claim: shown, denied or not decided

`plan` reads the claims, `stored` keeps runs, `work` makes them, `statistics` says what they show, `cells` and `tables`
write the pages.
"""
