"""The server's gRPC services: a module for each service, and the modules that the services share.
In the server, only this package and a few modules of capabilities (optional parts of the server)
use protobuf types; an import-linter contract lists them."""
