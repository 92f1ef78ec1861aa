//! Uploads a checkpoint to an object store, on a thread of each rank.
//!
//! ```text
//!   thread of each rank   its file .......... | done
//!   thread of rank 0      its file, buffers . | done | until all files exist | manifest, latest, removal of leftovers
//!   engine                training ........... wait: all ranks done? -> rank 0's thread finished?
//! ```

use super::UploadRequest;
use super::bucket::{ObjectBucket, block_on, buffers_object, objects, rank_object, store_error};
use crate::checkpoint::folder::LATEST;
use crate::checkpoint::manifest::{MANIFEST, Manifest};
use crate::checkpoint::rank_agreement::remote_failure;
use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, agree};
use crate::error::Result;
use crate::notice::emit;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The interval at which rank 0 checks whether the other ranks' files have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// The interval at which rank 0 reports progress.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// An upload in progress. Dropping it cancels the upload.
pub(crate) struct CheckpointUpload {
    url: String,
    /// The channel that receives the result of sending this rank's files.
    send_result: Receiver<Result<()>>,
    /// The thread, which returns the result of the complete upload.
    thread: Option<JoinHandle<Result<()>>>,
    stop: Arc<AtomicBool>,
}

impl CheckpointUpload {
    /// Starts an upload.
    ///
    /// # Errors
    /// Fails if the address is invalid or a thread cannot be created.
    pub fn start(request: UploadRequest) -> Result<Option<Self>> {
        let (bucket, url) = (ObjectBucket::open(&request.url)?, request.url.clone());
        Self::start_in(bucket, request)
            .map(Some)
            .map_err(|e| store_error(&url, format!("cannot start a thread for it: {e}")))
    }

    pub(super) fn start_in(bucket: ObjectBucket, request: UploadRequest) -> std::io::Result<Self> {
        let (result_sender, send_result) = channel();
        let stop = Arc::<AtomicBool>::default();
        let (url, stopped) = (request.url.clone(), stop.clone());
        let send = move || {
            let url = request.url.clone();
            block_on(&url, async || {
                UploadWorker { bucket, request, stop: stopped, start: Instant::now() }.run(&result_sender).await
            })
        };
        let thread = Builder::new().name("checkpoint upload".into()).spawn(send)?;
        Ok(Self { url, send_result, thread: Some(thread), stop })
    }

    /// Waits until all ranks' files and the manifest are uploaded. Collective.
    ///
    /// # Errors
    /// Fails on all ranks if an object could not be sent, and if a collective fails.
    pub fn wait(mut self, comm: &dyn Communicator) -> Result<(), JointOperationFailure> {
        let elsewhere = || remote_failure(Path::new(&self.url));
        // A thread that ends without sending a result has panicked; the join below returns the error.
        let send_result = self.send_result.recv().unwrap_or(Ok(()));
        agree(comm, send_result, elsewhere())?;
        let joined = self.thread.take().map_or(Ok(Ok(())), JoinHandle::join);
        let done =
            joined.unwrap_or_else(|_| Err(store_error(&self.url, "the thread that uploads to it panicked".into())));
        agree(comm, done, elsewhere())
    }
}

impl Drop for CheckpointUpload {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The data of the upload thread.
struct UploadWorker {
    bucket: ObjectBucket,
    request: UploadRequest,
    stop: Arc<AtomicBool>,
    start: Instant,
}

impl UploadWorker {
    async fn run(self, result_sender: &Sender<Result<()>>) -> Result<()> {
        let own = self.upload_own_files().await;
        let manifest = match own {
            Ok(manifest) => manifest,
            Err(error) => {
                _ = result_sender.send(Err(error));
                return Ok(());
            }
        };
        _ = result_sender.send(Ok(()));
        if self.request.rank == 0 { self.complete(&manifest).await } else { Ok(()) }
    }

    /// Sends the files of this rank, except those that already exist, and returns the manifest.
    async fn upload_own_files(&self) -> Result<Manifest> {
        let UploadRequest { folder, rank, piece, .. } = &self.request;
        let manifest = Manifest::read(&folder.join(MANIFEST))?;
        let sizes = self.bucket.sizes(&manifest.tag).await?;
        let own = &manifest.files[*piece];
        let mut files = vec![(&own.name, rank_object(own), own.bytes)];
        if let (0, Some(buffers)) = (rank, &manifest.buffers) {
            files.push((&buffers.name, buffers_object(buffers), buffers.bytes));
        }
        if *rank == 0 {
            let (tag, url, sum) = (&manifest.tag, self.bucket.url(), objects(&manifest).map(|o| o.1).sum::<u64>());
            emit(&format!("checkpoint {tag}: uploading {sum} bytes to {url}"));
        }
        let mut last_report = Instant::now();
        for (name, object, bytes) in files.iter().filter(|(_, object, bytes)| sizes.get(object) != Some(bytes)) {
            let progress = |done: u64| {
                if *rank == 0 && last_report.elapsed() >= REPORT_INTERVAL {
                    last_report = Instant::now();
                    emit(&format!("checkpoint {}: {done} of {bytes} bytes of {name} uploaded", manifest.tag));
                }
            };
            self.bucket.put_file(&[&manifest.tag, object], (&folder.join(name), *bytes), &self.stop, progress).await?;
        }
        Ok(manifest)
    }

    /// Completes the checkpoint once the files of all ranks exist.
    async fn complete(&self, manifest: &Manifest) -> Result<()> {
        let tag = manifest.tag.as_str();
        let mut sizes = self.bucket.sizes(tag).await?;
        while objects(manifest).any(|(object, bytes)| sizes.get(&object) != Some(&bytes)) {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            sizes = self.bucket.sizes(tag).await?;
        }
        self.bucket.put(&[tag, MANIFEST], manifest.to_text().into_bytes()).await?;
        if self.request.is_latest {
            self.bucket.put(&[LATEST], tag.as_bytes().to_vec()).await?;
        }
        // The leftovers of an earlier checkpoint of this name are removed.
        let is_current = |object: &String| object == MANIFEST || objects(manifest).any(|(own, _)| own == *object);
        for object in sizes.keys().filter(|object| !is_current(object)) {
            self.bucket.remove(&[tag, object]).await;
        }
        let (url, seconds) = (self.bucket.url(), self.start.elapsed().as_secs_f64());
        emit(&format!("checkpoint {tag} is complete in {url}, after {seconds:.1} s"));
        Ok(())
    }
}
