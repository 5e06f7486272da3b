"""A PyTorch function or module, by way of TorchDynamo and AOTAutograd -> graphs of ATen operators -> ClosedJaxprs."""
