"""The border to gRPC and protobuf: error table, conversions, construction of servers and channels."""
