"""Builds and reads protobuf messages. No other module of the client handles them."""
