"""Predictions of a trained model, in one process with PyTorch alone: no TorchRec, FBGEMM or process group."""
