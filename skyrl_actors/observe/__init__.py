"""Metric registry, counters, spans, logs, and the Grafana dashboard."""
