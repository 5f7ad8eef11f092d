"""The program of the page on torch.distributed.checkpoint: killed and resumed, on two ranks."""

import pytest
from tests.integrations.hosts.harness import check_exact_resume, program_of


@pytest.mark.slow  # `make test-hosts` runs it
@pytest.mark.process
@pytest.mark.multirank
def test_the_program_of_the_page_resumes_exactly(tmp_path):
    check_exact_resume(program_of("trainers/dcp.md"), tmp_path, ranks=2)
