"""The Nexmark benchmark: an auction site's events, and the queries q0 to q22 over them."""
