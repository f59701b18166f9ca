"""Builds and reads the client's protobuf messages. No other module of the client handles them."""
