"""The server's gRPC side: one thin file per service. Only this package and a few modules that an
import contract names see protobuf types."""
