"""`ps-serve`: predictions of a saved model in the Open Inference Protocol, over gRPC and HTTP."""
