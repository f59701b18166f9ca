"""The server's gRPC side: a module for each service, and the modules that the services share. Only
this package and a few modules that an import contract names use protobuf types."""
