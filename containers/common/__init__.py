"""What the training images share: the job and its environment, events, stop requests, checkpoints, rows, publishing.

The modules that training starts with import neither PyTorch nor transformers; functions that need them import them.
"""
