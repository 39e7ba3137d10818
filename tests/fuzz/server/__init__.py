"""A fuzzer of the served engine: what one client sends must cost another client's stream nothing.

It makes its own inputs. A tool that follows `/openapi.json` alone sends bodies of the right shape,
and what ended engines had the wrong size, depth or meaning: schemas, frames, templates."""
