"""The manifest of a save with sealed blobs: what is published when, and what stops it."""

from types import SimpleNamespace

import pytest
from tests.core.manifests import results_of
from tests.core.planned import raw_places
from tests.core.save.jobs import memory, request_of, stored

from penstock.core.catalog.commit_table import Commit, Event, State
from penstock.core.catalog.publisher import Publisher
from penstock.core.concurrency.timing import SYSTEM_CLOCK
from penstock.core.config.model import load_config
from penstock.core.errors import FormatError, SaveError
from penstock.core.format.records import blob_name, commit_name, index_name, part_name
from penstock.core.plugins.registry import default_registry
from penstock.core.ranks.agreement import AgreementOfOne
from penstock.core.rounds.posts import Result
from penstock.core.save.committer import Committer
from penstock.core.save.manifest import ManifestWriter, RankShare
from penstock.testing.faults import FaultyBackend


class Watched(AgreementOfOne):
    """Keeps the results instead of posting them."""

    def __init__(self, commit):
        super().__init__(commit)
        self.terms, self.results = {"providers": {}}, []

    def published(self, result, cause="", totals=()):
        self.results.append(result)


class Sealed:
    """A save of one process with sealed blobs."""

    def __init__(self, name, *, begin=lambda: None, check=lambda: None):
        config = load_config({"backend": memory(name), "chunk_bytes": 4096})
        self.request = request_of(config)
        self.backend = FaultyBackend(memory(name))
        self.state = Commit()
        self.agreement = Watched(self.state)
        self.uid = self.agreement.uid
        self.marked = []
        blob = blob_name(self.uid, 0, 0, "raw")
        self.blobs = [(blob, raw_places(self.request.plan)[1])]
        self.backend.publish(blob, bytes(self.blobs[0][1]))
        publisher = Publisher(self.backend, self.state, uid=self.uid, step=3, grace_s=60)
        publisher.publish_intent()

        def begins():
            begin()
            self.state.feed(Event.PUBLISH_STARTED)

        self.committer = Committer(
            request=self.request,
            manifest=ManifestWriter(self.request, {}, shipper=default_registry().shipper),
            backend=self.backend,
            publisher=publisher,
            agreement=self.agreement,
            bases=None,
            known=None,
            onward=SimpleNamespace(prepare=self.mark),
            state=self.state,
            clock=SYSTEM_CLOCK,
            check=check,
            begin=begins,
            tick=lambda: None,
        )

    def mark(self, record):
        self.marked.append((record.step, commit_name(3, 0) in stored(self.backend)))

    def commit(self):
        plan, share = self.request.plan, RankShare()
        results = dict(enumerate(results_of(plan, self.request.block_bytes)[0]))
        part = self.committer.encode_part(results, self.blobs, share=share, derived={}, choices=())
        self.committer.commit(part, share=share, derived={}, refers=False)

    @property
    def published(self):
        """The names that were published after the blob and the intent."""
        calls = self.backend.calls
        return [names[0] for operation, names in calls if operation == "publish"][2:]


def test_part_index_and_record_are_published_in_this_order():
    save = Sealed("committer-order")
    save.commit()
    assert save.published == [part_name(save.uid, 0), index_name(save.uid), commit_name(3, 0)]
    assert save.marked == [(3, False)]
    assert save.agreement.results == [Result.COMMITTED]
    assert save.state.state is State.COMMITTED


def test_rank_other_than_0_publishes_only_its_part():
    save = Sealed("committer-follows")
    save.agreement.leads = save.agreement.alone = False
    save.commit()
    assert save.published == [part_name(save.uid, 0)]
    assert save.marked == save.agreement.results == []


def test_a_forbidden_commit_is_reported_as_never_coming():
    def refuse():
        raise SaveError("given up")

    save = Sealed("committer-refused", begin=refuse)
    with pytest.raises(SaveError, match="given up"):
        save.commit()
    assert commit_name(3, 0) not in stored(save.backend)
    assert save.agreement.results == [Result.NEVER]


def test_abandoned_save_publishes_nothing_more():
    def given_up():
        raise SaveError("given up")

    save = Sealed("committer-given-up", check=given_up)
    with pytest.raises(SaveError, match="given up"):
        save.commit()
    assert save.published == []


def test_unreadable_manifest_is_refused_before_the_seal(monkeypatch):
    def refused(*_, **__):
        raise FormatError("too many objects")

    save = Sealed("committer-large")
    monkeypatch.setattr(save.committer.manifest, "encode", refused)
    with pytest.raises(SaveError, match="no reader would accept its manifest"):
        save.commit()
    assert save.state.state is State.WRITING
