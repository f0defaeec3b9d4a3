"""The decoder language model: its config, layers, embeddings, loss and products."""
