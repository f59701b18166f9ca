"""The only package of the server that sees protobuf: one thin file per service."""
