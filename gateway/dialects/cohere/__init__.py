"""Cohere's and Jina's reranking: translates requests and answers; a worker scores the documents."""
