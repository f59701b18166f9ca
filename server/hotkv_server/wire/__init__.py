"""The server's gRPC services: a module for each, and what they share. Only this package and a
few modules of capabilities use protobuf types; an import-linter contract lists them."""
