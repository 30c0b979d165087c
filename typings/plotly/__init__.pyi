"""The part of plotly that this project uses: its place on disk."""

__file__: str
