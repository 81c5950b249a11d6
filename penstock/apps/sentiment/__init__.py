"""Sentiment analysis: what tweets say about the attributes of products."""
