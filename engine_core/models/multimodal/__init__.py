"""Models that take images or sounds beside text: their encoders, by transformers' modules. The
decoder behind them is our own."""
