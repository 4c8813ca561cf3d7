"""What other trainers released, reproduced for the golden tests alone: nothing of it trains anything here.

Each file is one peer or one subject. A function belongs here where its result is only compared with a peer's; one that
training calls belongs to `genrl/mdp` or `genrl/objectives`.
"""
