"""The stock exchange (docs/papers.md: W9): orders to buy and to sell, the trades that they make, the traded volume.

`orders.py` makes the orders by a seed, and `book.py` matches those of one symbol.
"""
