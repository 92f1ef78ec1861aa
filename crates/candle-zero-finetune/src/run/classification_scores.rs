//! Classification scores: accuracy, precision, recall and F1 from counts.

use std::fmt;

/// Counts of predicted and true classes, for each class. The counts of several ranks can be added.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassificationScores {
    /// For each class: correct predictions, all predictions, texts of the class.
    counts: Vec<[u64; 3]>,
}

/// The metrics of one class. A share is 0 if there are no texts to divide by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassMetrics {
    /// The share of texts predicted as this class that belong to it.
    pub precision: f64,
    /// The share of texts of this class that were predicted as this class.
    pub recall: f64,
    /// The harmonic mean of precision and recall.
    pub f1: f64,
    /// The number of texts of this class.
    pub texts: u64,
}

impl ClassificationScores {
    /// Creates scores for `classes` classes without any texts.
    pub fn new(classes: usize) -> Self {
        Self { counts: vec![[0; 3]; classes] }
    }

    /// Counts a text of class `label` that was predicted as class `predicted`.
    ///
    /// # Panics
    ///
    /// Panics if one of the classes does not exist.
    pub fn count(&mut self, predicted: usize, label: usize) {
        self.counts[label][0] += u64::from(predicted == label);
        self.counts[predicted][1] += 1;
        self.counts[label][2] += 1;
    }

    /// Returns the counts as numbers, three for each class, which can be added over batches and ranks. f64 represents
    /// them exactly.
    pub fn to_numbers(&self) -> Vec<f64> {
        self.counts.as_flattened().iter().map(|count| *count as f64).collect()
    }

    /// Creates the scores from sums of the numbers that [`to_numbers`](Self::to_numbers) returns.
    pub fn of_numbers(sums: &[f64]) -> Self {
        Self { counts: sums.as_chunks().0.iter().map(|class: &[f64; 3]| class.map(|sum| sum as u64)).collect() }
    }

    /// Returns the number of counted texts.
    pub fn texts(&self) -> u64 {
        self.counts.iter().map(|[_, _, actual]| actual).sum()
    }

    /// Returns the share of texts whose class was predicted correctly, or 0 without texts.
    pub fn accuracy(&self) -> f64 {
        share(self.counts.iter().map(|[correct, ..]| correct).sum(), self.texts())
    }

    /// Returns the mean F1 over the classes that occur in the labels or the predictions: scikit-learn's `f1_score` with
    /// `average="macro"`.
    pub fn macro_f1(&self) -> f64 {
        let seen: Vec<f64> =
            self.counts.iter().filter(|[_, predicted, actual]| predicted + actual > 0).map(f1).collect();
        if seen.is_empty() { 0.0 } else { seen.iter().sum::<f64>() / seen.len() as f64 }
    }

    /// Returns the metrics of each class.
    pub fn classes(&self) -> impl Iterator<Item = ClassMetrics> {
        self.counts.iter().map(|counts| {
            let [correct, predicted, actual] = *counts;
            let (precision, recall) = (share(correct, predicted), share(correct, actual));
            ClassMetrics { precision, recall, f1: f1(counts), texts: actual }
        })
    }
}

fn share(part: u64, total: u64) -> f64 {
    if total == 0 { 0.0 } else { part as f64 / total as f64 }
}

fn f1([correct, predicted, actual]: &[u64; 3]) -> f64 {
    share(2 * correct, predicted + actual)
}

/// Writes accuracy and F1 on one line.
impl fmt::Display for ClassificationScores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "accuracy {:.2} %, macro F1 {:.4}", 100.0 * self.accuracy(), self.macro_f1())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the scores of pairs of predicted and true classes.
    fn of(classes: usize, pairs: &[(usize, usize)]) -> ClassificationScores {
        let mut scores = ClassificationScores::new(classes);
        pairs.iter().for_each(|(found, label)| scores.count(*found, *label));
        scores
    }

    #[test]
    fn scores_are_those_of_scikit_learn() {
        // Expected: accuracy_score and precision_recall_fscore_support of y_true = [0, 0, 0, 1, 1, 2], y_pred = [0, 1,
        // 0, 1, 2, 1].
        let pairs = [(0, 0), (1, 0), (0, 0), (1, 1), (2, 1), (1, 2)];
        let scores = of(4, &pairs);
        assert_eq!((scores.texts(), scores.accuracy()), (6, 0.5));
        let class = |precision, recall, f1, texts| ClassMetrics { precision, recall, f1, texts };
        let found: Vec<ClassMetrics> = scores.classes().collect();
        let third = 1.0 / 3.0;
        // Class 3 never occurs and does not count in the mean.
        let expected = [
            class(1.0, 2.0 / 3.0, 0.8, 3),
            class(third, 0.5, 0.4, 2),
            class(0.0, 0.0, 0.0, 1),
            class(0.0, 0.0, 0.0, 0),
        ];
        assert_eq!(found, expected);
        assert!((scores.macro_f1() - 0.4).abs() < 1e-12);
        assert_eq!(scores.to_string(), "accuracy 50.00 %, macro F1 0.4000");
        assert_eq!(of(2, &[]).to_string(), "accuracy 0.00 %, macro F1 0.0000");
    }

    #[test]
    fn numbers_of_ranks_add_up_to_those_of_all_texts() {
        let (one, two) = ([(0, 1), (1, 1)], [(2, 0), (2, 2), (0, 1)]);
        let [a, b] = [of(3, &one), of(3, &two)].map(|scores| scores.to_numbers());
        let sums: Vec<f64> = a.iter().zip(b).map(|(a, b)| a + b).collect();
        assert_eq!(ClassificationScores::of_numbers(&sums), of(3, &[one.as_slice(), &two].concat()));
    }
}
