"""Apache Kafka: topics as sources and sinks, by the client library confluent-kafka."""
