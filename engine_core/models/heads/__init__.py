"""Draft heads that read a target model's hidden states."""
